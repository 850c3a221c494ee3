"""From defaults, TOML and flags to one configuration, and the sentence for everything that can't be used."""

from __future__ import annotations

import dataclasses
import os
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs import config_file, memory, mountinfo
from ckptfs.config import Config
from ckptfs.config_file import load
from ckptfs.config_keys import KEYS, OBJECT_STORE_KEYS
from ckptfs.errors import CkptfsError, Exit


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "ckptfs.toml"
    file.write_text(text)
    return str(file)


def refusal(flags: dict[str, object], file: str | None = None) -> str:
    with pytest.raises(CkptfsError) as caught:
        load(flags, file)
    assert caught.value.code is Exit.USAGE
    assert "\n" not in caught.value.message
    return caught.value.message


def test_every_field_has_a_key() -> None:
    in_options = {"tier_options", *OBJECT_STORE_KEYS}
    assert {"options" if key in in_options else key for key in KEYS} | {"config_file"} == {
        item.name for item in dataclasses.fields(Config)
    }


def test_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 10 << 30)
    monkeypatch.setattr(config_file, "free_space", lambda directory: 100 << 30)
    loaded = load({"mountpoint": str(tmp_path / "mnt")})
    config = loaded.config
    assert config.mountpoint == str(tmp_path / "mnt")
    assert config.tier == f"file://{tmp_path}/data/tier"
    assert config.cache_size == 5 << 30
    assert config.spill_size == 20 << 30
    assert config.spill_dir.startswith(str(tmp_path / "data" / "spill"))
    assert config.allow_other is (os.geteuid() == 0)
    assert loaded.given == {"mountpoint"}
    assert load({}).config.mountpoint == "/ckpt"


def test_small_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 20 << 20)
    monkeypatch.setattr(config_file, "free_space", lambda directory: 20 << 20)
    config = load({}).config
    assert config.cache_size == 64 << 20
    assert config.spill_size == 0


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, 'cache_size = "1GiB"\nfsync = "tier"\nsettle-time = "500ms"\nworkers = 3\n')
    config = load({"cache_size": "2GiB", "fsync": None}, file).config
    assert (config.cache_size, config.fsync, config.settle_time, config.workers) == (2 << 30, "tier", 0.5, 3)


def test_the_default_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "niceness = 7")
    monkeypatch.setattr(config_file, "default_file", lambda: file)
    assert load({}).config.niceness == 7
    assert load({}).file == file
    assert load({}, os.devnull).config.niceness == Config.__dataclass_fields__["niceness"].default


def test_tables(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        '[fsync_rules]\n"*.metadata" = "tier"\n"*" = "cache"\n'
        '[tier_options]\nregion = "x"\nparts = 3\nverify = true\n',
    )
    config = load({}, file).config
    assert config.fsync_rules == (("*.metadata", "tier"), ("*", "cache"))
    assert config.options == {"region": "x", "parts": "3", "verify": "true"}


def test_percentages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 1 << 30)
    monkeypatch.setattr(config_file, "free_space", lambda directory: 4 << 30)
    config = load({"cache_size": "25%", "spill_size": "50%"}, write(tmp_path, 'memory_floor = "20%"')).config
    assert (config.cache_size, config.spill_size, config.memory_floor) == (256 << 20, 2 << 30, 0.2)
    assert load({"cache_size": "25%", "cache_dir": str(tmp_path)}).config.cache_size == 1 << 30


def test_relative_paths_start_where_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf").mkdir()
    file = write(tmp_path / "conf", 'cache_dir = "nvme"\nmountpoint = "../mnt"')
    monkeypatch.chdir(tmp_path / "data" if (tmp_path / "data").exists() else tmp_path)
    config = load({"spill_dir": "spill"}, file).config
    assert config.cache_dir == str(tmp_path / "conf" / "nvme")
    assert config.mountpoint == str(tmp_path / "mnt")
    assert config.spill_dir == os.path.join(os.getcwd(), "spill")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('cach_size = "1GiB"', "unknown key 'cach_size'"),
        ('cach_size = "1GiB"', "did you mean 'cache_size'?"),
        ("cache_size = true", "true is not a size"),
        ("cache_size = 1.5", "1.5 is not a size"),
        ('cache_size = "1 apple"', "'1 apple' is not a size"),
        ('cache_size = "15MiB"', "too small"),
        ('cache_size = "1%"\ncache-size = 5', "twice"),
        ("tier = 3", "3 is not a text"),
        ('tier = ""', "the text is empty"),
        ('workers = "4"', "'4' is not a whole number"),
        ("workers = 0", "between 1 and 64"),
        ("niceness = 20", "between -20 and 19"),
        ("settle_time = nan", "nan"),
        ("drain_timeout = -1", "-1"),
        ("memory_floor = 2", "between 0 and 0.9"),
        ('fsync = "disk"', "'disk' is not one of cache, tier"),
        ('log_level = "loud"', "'loud' is not one of"),
        ("allow_other = 1", "1 is neither true nor false"),
        ('stream_globs = "*.log"', "list of patterns"),
        ('fsync_rules = "tier"', "table"),
        ('[fsync_rules]\n"*.pt" = "no"', "'no' for '*.pt'"),
        ("[tier_options]\na = [1]", "[1] for 'a'"),
        ("cache_size =", "not valid TOML"),
        ("chunk_size = 10", "between"),
        ("settle_time = 1" + "0" * 400, "is not between 0 s and 1h"),
        ("settle_time = inf", "is not between 0 s and 1h"),
        ("cache_size = 1" + "0" * 400, "is not between 0 B and"),
        ("cache_size = -5", "-5 is not between 0 B and"),
        ("cache_size = 0x1" + "0" * 5000, "a number of thousands of digits is not between"),
        ("workers = 1" + "0" * 400, "... is not between 1 and 64"),
        ("memory_floor = nan", "nan is not between 0 and 0.9"),
        ("memory_floor = 1" + "0" * 400, "is not between 0 and 0.9"),
        ("[tier_options]\na = 0x1" + "0" * 5000, "a number of thousands of digits for 'a'"),
        ("cache_size = 1" + "0" * 5000, "not valid TOML"),
    ],
)
def test_bad_files_are_one_sentence_with_key_and_file(tmp_path: Path, text: str, part: str) -> None:
    file = write(tmp_path, text)
    message = refusal({}, file)
    assert part in message
    assert file in message
    if "TOML" not in part:
        key = text.lstrip("[").split("=")[0].split("]")[0].strip()
        assert key in message or key.replace("_", "-") in message


@pytest.mark.parametrize("text", ["--5", "-", "", "4.0", "\u0664", "1" + "0" * 5000])
def test_a_flag_that_is_no_whole_number(text: str) -> None:
    assert "is not a whole number" in refusal({"workers": text})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in refusal({}, str(tmp_path / "missing.toml"))
    assert "directory" in refusal({}, str(tmp_path))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "TOML" in refusal({}, str(tmp_path / "binary.toml"))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "s3:///prefix",
        "ftp://x/y",
        "file://host/x",
        "file:relative",
        "/plain",
        "file:///a?b",
        "x",
        "file:///",
    ],
)
def test_bad_tier_urls(url: str) -> None:
    assert refusal({"tier": url}).startswith("--tier: ")


def test_a_plain_path_as_tier_is_told_how_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"write file://{tmp_path}/my%20dir" in refusal({"tier": "./my dir"})
    assert load({"tier": "file:///a%20b/../c"}).config.tier == "file:///c"


def test_an_object_store_and_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ca.pem").touch()
    file = write(
        tmp_path,
        'tier = "s3://bucket/run%207/"\nendpoint_url = ["http://10.0.0.1:9000/", "http://[fd00::1]"]\n'
        'region = "x"\nprofile = "p"\nca_bundle = "ca.pem"\nverify_tls = true\n'
        '[tier_options]\nother = "y"\n',
    )
    config = load({}, file).config
    assert config.tier == "s3://bucket/run%207"
    assert config.options == {
        "endpoint_url": "http://10.0.0.1:9000 http://[fd00::1]", "region": "x", "profile": "p",
        "ca_bundle": str(tmp_path / "ca.pem"), "verify": "true", "other": "y",
    }  # fmt: skip
    monkeypatch.chdir(tmp_path)
    flags: dict[str, object] = {"endpoint_url": ("https://h", "https://h/"), "verify_tls": False}
    config = load(flags, file).config
    assert (config.options["endpoint_url"], config.options["verify"]) == ("https://h", "false")
    one = load({"tier": "s3://bucket", "endpoint_url": "http://a http://b"}).config
    assert (one.tier, one.options) == ("s3://bucket", {"endpoint_url": "http://a http://b"})


@pytest.mark.parametrize("key", sorted(OBJECT_STORE_KEYS))
def test_options_of_an_object_store_with_another_tier(tmp_path: Path, key: str) -> None:
    (tmp_path / "ca.pem").touch()
    values = {"endpoint_url": "http://h", "verify_tls": False, "ca_bundle": str(tmp_path / "ca.pem")}
    value = values.get(key, "x")
    flags: dict[str, object] = {"tier": f"file://{tmp_path}/t", key: value}
    message = refusal(flags)
    assert message.startswith(f"--{key.replace('_', '-')}: ")
    assert f"file://{tmp_path}/t" in message
    assert refusal({key: value}).startswith(f"--{key.replace('_', '-')}: ")
    written = "false" if value is False else f'"{value}"'
    file = write(tmp_path, f'tier = "s3://bucket"\n{key} = {written}\n')
    assert load({"tier": f"file://{tmp_path}/t"}, file).config.options == {}
    file = write(tmp_path, f"{key} = {written}\n")
    assert f"{key} in {file}: " in refusal({}, file)


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ((), "URL, or a list"),
        ("", "URL, or a list"),
        ((3,), "URL, or a list"),
        ("10.1.2.3", "like https://10.1.2.3"),
        ("http://", "like https"),
        ("http://h:x", "like https"),
        ("http://h:0", "like https"),
        ("http://-h", "like https"),
        ("ftp://h", "like https"),
        ("http://h?x", "more in it than an address"),
        ("http://h/#x", "more in it than an address"),
        (("http://h/a b",), "more in it than an address"),
        ("http://key:hush@h", "credentials go to"),
    ],
)
def test_endpoints_that_cannot_be_used(value: object, part: str) -> None:
    message = refusal({"tier": "s3://bucket", "endpoint_url": value})
    assert message.startswith("--endpoint-url: ")
    assert part in message
    assert "hush" not in message


def test_a_ca_bundle_that_is_not_there(tmp_path: Path) -> None:
    flags: dict[str, object] = {"tier": "s3://bucket", "ca_bundle": str(tmp_path / "no.pem")}
    assert refusal(flags) == f"--ca-bundle: there is no file {tmp_path}/no.pem"


def test_nothing_may_lie_in_the_mount(tmp_path: Path) -> None:
    mountpoint = str(tmp_path / "mnt")
    for key, value in (
        ("tier", f"file://{mountpoint}/tier"), ("cache_dir", mountpoint), ("spill_dir", mountpoint + "/x"),
        ("log_file", mountpoint + "/log"),
    ):  # fmt: skip
        assert "inside the mount point" in refusal({"mountpoint": mountpoint, key: value})


def test_nothing_may_lie_in_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "srv").mkdir()
    (tmp_path / "link").symlink_to("srv")
    base = {"mountpoint": str(tmp_path / "mnt")}
    for tier in ("srv", "link"):
        for key, value in (
            ("cache_dir", "srv"), ("cache_dir", "srv/c"), ("cache_dir", "link/c"), ("spill_dir", "srv/s"),
            ("log_file", "srv/log"), ("mountpoint", "srv/mnt"),
        ):  # fmt: skip
            message = refusal({**base, "tier": f"file://{tmp_path}/{tier}", key: str(tmp_path / value)})
            assert message.startswith(
                "MOUNTPOINT: " if key == "mountpoint" else f"--{key.replace('_', '-')}: "
            )
            assert f"lies inside the tier's directory {tmp_path}/srv; choose another place" in message
    assert "data lies inside the tier's" in refusal(
        {**base, "tier": f"file://{tmp_path}/data", "spill_size": 0}
    )
    monkeypatch.setenv("CKPTFS_RUN_DIR", str(tmp_path / "srv" / "run"))
    assert refusal({**base, "tier": f"file://{tmp_path}/srv"}).startswith("CKPTFS_RUN_DIR: ")
    monkeypatch.setenv("CKPTFS_RUN_DIR", str(tmp_path / "run"))
    fine = load({**base, "tier": f"file://{tmp_path}/srv/t", "cache_dir": str(tmp_path / "srv")}).config
    assert fine.cache_dir == f"{tmp_path}/srv"


def test_nothing_may_lie_in_another_ckptfs_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = mountinfo.Mount(1, 0, "0:50", str(tmp_path / "other"), mountinfo.FSTYPE, "ckptfs")
    monkeypatch.setattr(mountinfo, "read", lambda: [there])
    base = {"mountpoint": str(tmp_path / "mnt")}
    message = refusal({**base, "tier": f"file://{tmp_path}/other/t"})
    assert message == (
        f"--tier: {tmp_path}/other/t lies inside the ckptfs mount {tmp_path}/other;"
        " name its directory on that mount's tier"
    )
    for key in ("cache_dir", "spill_dir", "log_file"):
        assert "lies inside the ckptfs mount" in refusal({**base, key: str(tmp_path / "other" / "x")})


texts = st.text(max_size=30)
configs = st.builds(
    Config,
    mountpoint=texts,
    tier=texts,
    cache_size=st.integers(),
    fsync_rules=st.lists(st.tuples(texts, texts)).map(tuple),
    stream_globs=st.lists(texts).map(tuple),
    options=st.dictionaries(texts, texts),
    settle_time=st.floats(allow_nan=False),
)


@given(configs)
def test_json_round_trip(config: Config) -> None:
    text = config.to_json()
    assert "\n" not in text
    assert text.isascii()
    assert Config.from_json(text) == config


def test_json_keeps_undecodable_paths() -> None:
    config = Config(mountpoint=os.fsdecode(b"/\xff"), tier="file:///x", cache_size=1)
    assert Config.from_json(config.to_json()) == config


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"mountpoint": "/x"}', '{"odd": 1}'])
def test_json_that_is_none(text: str) -> None:
    with pytest.raises(CkptfsError):
        Config.from_json(text)


def loaded_or_refused(flags: dict[str, Any], file: str | None) -> Config | None:
    """The configuration, or None after a proper refusal."""
    try:
        return load(flags, file).config
    except CkptfsError as error:
        if error.code is not Exit.USAGE or not error.message:
            raise
        return None


scalars = st.one_of(st.booleans(), st.integers(), st.floats(), texts, st.none())
values = st.one_of(scalars, st.lists(scalars, max_size=3), st.dictionaries(texts, scalars, max_size=3))
names = st.one_of(
    st.sampled_from(sorted(KEYS)), st.text(string.ascii_letters + "-_", min_size=1, max_size=12)
)


@settings(max_examples=150, deadline=None)
@given(table=st.dictionaries(names, values, max_size=4))
def test_any_values_give_a_configuration_or_a_clear_error(table: dict[str, Any]) -> None:
    flags = {key: value for key, value in table.items() if key in KEYS}
    config = loaded_or_refused(flags, None)
    assert config is None or Config.from_json(config.to_json()) == config


@settings(max_examples=100, deadline=None)
@given(text=st.one_of(texts, st.builds("{} = {}".format, names, st.one_of(texts, scalars.map(repr)))))
def test_any_file_gives_a_configuration_or_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    file = tmp_path_factory.mktemp("toml") / "x.toml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    config = loaded_or_refused({}, str(file))
    assert config is None or config.cache_size >= config_file.CACHE_LEAST
