"""Installed Python distributions."""

from __future__ import annotations

import platform
from importlib import metadata

from pd.doctor.answers import Packages


def answer() -> Packages:
    found = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in metadata.distributions()}
    return Packages(python=platform.python_version(), versions=found)
