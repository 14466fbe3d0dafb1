"""Key files: made so that only their owner reads them, and refused with words where they are not right."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd.runtime.config import ConfigError
from pd.runtime.keys import KEY_NBYTES, derived, make_cluster_key, read_api_keys, read_cluster_key


def secret(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_new_key_is_its_owners_alone_and_is_read_back(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    make_cluster_key(one)
    make_cluster_key(other)
    assert one.stat().st_mode & 0o777 == 0o600
    key = read_cluster_key(str(one))
    assert key is not None and len(key) == KEY_NBYTES
    assert key != read_cluster_key(str(other))


def test_a_key_in_use_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "key"
    make_cluster_key(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="exists"):
        make_cluster_key(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_may_read_is_refused_with_the_command_that_mends_it(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    make_cluster_key(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:03o}") as caught:
        read_cluster_key(str(path))
    assert caught.value.hint == f"chmod 600 {path}"


@pytest.mark.parametrize("text", ["", "hello", "pd-cluster-key-1 abcd", "pd-cluster-key-1 " + "g" * 64, "ab" * 32])
def test_what_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="holds no cluster key"):
        read_cluster_key(secret(tmp_path / "key", text))


def test_a_file_that_is_not_there_is_named_and_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file") as caught:
        read_cluster_key(str(tmp_path / "none"))
    assert "pd key" in caught.value.hint


def test_api_keys_stand_one_a_line(tmp_path: Path) -> None:
    path = secret(tmp_path / "keys", "# old\n" + "a" * 16 + "\n\n  " + "b" * 20 + "\n")
    assert read_api_keys(path) == ("a" * 16, "b" * 20)
    assert read_api_keys(None) == ()


@pytest.mark.parametrize("text", ["", "# none\n", "short", "has a space in it", "ümlaut" * 4])
def test_api_keys_that_protect_nothing_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        read_api_keys(secret(tmp_path / "keys", text))


def test_derived_keys_differ_by_purpose_and_by_key() -> None:
    keys = {derived(key, purpose) for key in (b"a" * 32, b"b" * 32) for purpose in ("one", "two")}
    assert len(keys) == 4 and all(len(key) == KEY_NBYTES for key in keys)
