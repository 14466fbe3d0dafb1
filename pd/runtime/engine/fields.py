"""config.json's fields by name and kind, with every fault kept in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping

Json = Mapping[str, object]


class Fields:
    """One pass over one config.json. What is wrong is noted in `faults`, and a value that hurts nobody is given."""

    def __init__(self, config: Json) -> None:
        self.config = config
        self.faults: list[str] = []

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer; `default` where it is absent or null."""
        value = self.config.get(name)
        if value is None:
            value = default
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        self.faults.append(f"{name} must be a positive integer, not {value!r}")
        return 1

    def count(self, name: str, default: int) -> int:
        """An integer from 0 on; `default` where it is absent, 0 where it is null."""
        value = self.config.get(name, default) or 0
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        self.faults.append(f"{name} must be an integer from 0 on, not {value!r}")
        return 0

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        self.faults.append(f"{name} must be a number, not {value!r}")
        return default

    def flag(self, name: str, *, default: bool = False) -> bool:
        return bool(self.config.get(name, default))

    def refuse(self, name: str, *known: object) -> None:
        """A fault unless the field is absent or says one of what is known."""
        if name in self.config and self.config[name] not in known:
            words = " or ".join(map(repr, known))
            self.faults.append(f"{name} {self.config[name]!r} is not supported; {words} is")
