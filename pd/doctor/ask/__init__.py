"""One module a library: imports it, puts questions to it, returns plain data. Each runs in a process of its own."""
