"""What pyproject.toml cannot say: the packages are those found under pd, and kernels/triton as pd.kernels."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["pd", "pd.*"]), "pd.kernels"])
