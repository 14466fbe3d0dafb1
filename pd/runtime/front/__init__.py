"""HTTP, the OpenAI API, and text."""
