"""`python -m pd` is `pd`."""

from pd.cli import main

main()
