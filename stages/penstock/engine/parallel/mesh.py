"""The one device mesh of a run."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.engine.parallel.degrees import Degrees

AXES = ("replicate", "shard")
"""Outermost first."""


def mesh_of(degrees: Degrees, device_type: str) -> DeviceMesh:
    """The device mesh. Every process of the world must call this, in the same order."""
    return init_device_mesh(device_type, (degrees.replicate, degrees.shard), mesh_dim_names=AXES)
