"""Small problems for planners: profiles of a few units, clusters of a few unlike devices."""

from hypothesis import strategies as st

from benchmarks.made_up.models import profile_of
from bireme.cluster.cluster import Bridge, Card, Cluster, Link, Server
from bireme.cluster.device import Device
from bireme.profile.profile import Profile

__all__ = ["small_clusters", "small_profiles"]


@st.composite
def small_profiles(draw: st.DrawFn, *, most_units: int = 4) -> Profile:
    num_units = draw(st.integers(1, most_units))

    def numbers(least: int, most: int) -> list[int]:
        return draw(st.lists(st.integers(least, most), min_size=num_units, max_size=num_units))

    return profile_of(
        numbers(1, 9),
        numbers(1, 9),
        sizes=draw(st.sampled_from([(1,), (2,), (1, 2)])),
        parameter_bytes=numbers(0, 20),
        kept_bytes=numbers(0, 9),
        boundary_bytes=numbers(0, 4),
        update_s=numbers(0, 3),
    )


@st.composite
def small_clusters(draw: st.DrawFn, *, most_devices: int = 3) -> Cluster:
    """One or two servers of devices of three kinds, on links that may be slow."""
    kinds = [
        Device("any", "emulated", draw(st.integers(60, 800)), speed=draw(st.sampled_from([0.5, 1.0, 2.0])))
        for _ in range(2)
    ]
    count = draw(st.integers(1, most_devices))
    devices = [draw(st.sampled_from(kinds)) for _ in range(count)]
    cut = draw(st.integers(1, count))
    servers = []
    for name, own in (("a", devices[:cut]), ("b", devices[cut:])):
        if not own:
            continue
        places = tuple(range(len(own)))
        rate, slow = draw(st.sampled_from([1.0, 4.0, 100.0])), draw(st.sampled_from([0.5, 2.0, 50.0]))
        full = draw(st.booleans())
        bridges = (
            (Bridge("bus", places, Link(rate, draw(st.integers(0, 1)), full)),) if draw(st.booleans()) else ()
        )
        servers.append(Server(name, tuple(own), bridges, (), (Card("net", places, Link(slow, 0.5, full)),)))
    return Cluster(tuple(servers))
