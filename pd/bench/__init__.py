"""Measures servers, engines and their parts. A tool beside the house: it uses public doors only."""
