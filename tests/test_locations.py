"""A location keeps a URL as it was written, and a folder where it was named."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgood import PCcheck, TorchDCP
from lastgood.errors import ConfigError
from lastgood.locations import Location


@pytest.mark.parametrize("url", ["s3://b/j", "S3://b/j//k/", "gs://bucket/a b%20c?x=../y", "memory://x"])
def test_a_url_stays_a_url(url: str) -> None:
    location = Location.parse(url)
    assert (str(location), location.scheme) == (url, url.partition(":")[0].lower())
    assert Location.parse(location) is location
    with pytest.raises(
        ConfigError, match="is a URL, and a directory of this machine is needed here; of URLs only s3:// is known"
    ):
        _ = location.path
    with pytest.raises(ConfigError, match="is a URL"):
        TorchDCP(location)
    with pytest.raises(ConfigError, match="is a URL"):
        PCcheck(location)


@pytest.mark.parametrize("place", [Path("s3://b/j"), "file:///tmp/x", "FILE:/tmp/x"])
def test_a_url_that_was_a_path_or_names_a_folder_is_refused_at_once(place: Path | str) -> None:
    with pytest.raises(ConfigError, match="is a URL"):
        Location.parse(place)


def test_a_folder_is_where_it_was_when_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    location = Location.parse("a/b")
    monkeypatch.chdir("/")
    assert location.scheme == "file"
    assert location.path == tmp_path / "a" / "b" == Path(str(location))
    assert Location.parse("/a:/b").path == Path("/a:/b")
    assert PCcheck(location).directory == TorchDCP(location).directory == location.path
