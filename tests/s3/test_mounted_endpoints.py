"""Several endpoints of one store, and https with a private certificate authority."""

from __future__ import annotations

from collections.abc import Callable

from tests.crash.content import make
from tests.mounted.harness import wait_for
from tests.s3.certificates import Tls
from tests.s3.faults import Faults
from tests.s3.mounts import SMALL_CHUNKS, S3Mount, arrives, save
from tests.s3.proxy import Proxy, ranking_of
from tests.s3.servers import Server

MIB = 1 << 20


def test_two_endpoints_carry_parts_and_one_may_die(
    new_mount: Callable[..., S3Mount], seaweed: Server
) -> None:
    faults, ranking = Faults(), ranking_of(seaweed)
    with (
        Proxy(seaweed, faults=faults, ranking=ranking) as one,
        Proxy(seaweed, faults=faults, ranking=ranking) as two,
    ):
        mount = new_mount("m", one.endpoint, two.endpoint)
        mount.start(config=SMALL_CHUNKS)
        first = make("first", 1, 40 * MIB)
        (mount.point / "first").write_bytes(first)
        arrives(mount, {"first": first})
        assert one.part_bytes + two.part_bytes >= 40 * MIB
        assert min(one.part_bytes, two.part_bytes) > 8 * MIB

        one.rate = two.rate = 12 * MIB
        second = make("second", 1, 40 * MIB)
        (mount.point / "second").write_bytes(second)
        before = two.part_bytes
        wait_for(lambda: two.part_bytes > before + 3 * MIB, "parts on their way")
        two.down()
        two.clear()
        one.rate = 0
        arrives(mount, {"second": second})
        contents = save(mount)
        arrives(mount, contents)
        assert sum(two.counts.values()) == 0

        two.rate = 0
        two.up()
        third = make("third", 1, 16 * MIB)
        wait_for(lambda: again(mount, third) and two.part_bytes, "the other endpoint to be used again", 60)
        mount.umount()
    assert [key for key in ranking.trapped if "/probe-" not in key] == []


def again(mount: S3Mount, data: bytes) -> bool:
    (mount.point / "third").write_bytes(data)
    mount.wait()
    return True


def test_https_with_a_private_authority(new_mount: Callable[..., S3Mount], seaweed: Server, tls: Tls) -> None:
    with Proxy(seaweed, tls=tls.server) as proxy:
        mount = new_mount("m", proxy.endpoint)
        refused = mount.start(config=SMALL_CHUNKS, check=False)
        assert refused.returncode != 0
        assert "certificate" in refused.stderr.lower()
        mount.options = []
        mount.start("--ca-bundle", str(tls.ca), config=SMALL_CHUNKS)
        contents = save(mount)
        arrives(mount, contents)
        assert proxy.part_bytes > 9 * MIB
        mount.umount()
        mount.start()
        assert {name: (mount.point / name).read_bytes() for name in contents} == contents
        mount.umount()
