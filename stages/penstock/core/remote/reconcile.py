"""Reconcile a remote artifact with its local mirror before a build.

The remote artifact is authoritative; the mirror may be older, or belong to another run.
"""

from penstock.core.cache.input_digests import changed_inputs, digests_of_inputs, read_attempt
from penstock.core.cache.manifest import MANIFEST, read_manifest
from penstock.core.cache.stage import ATTEMPT, Stage, stage_key
from penstock.core.files import backup_rename
from penstock.core.remote.artifact_sync import RemoteArtifact


def sync_mirror(depot: RemoteArtifact, stage: Stage) -> str | None:
    """Make the mirror's record match the remote one, and download the intermediate files to resume
    from.

    Returns the key of the remote artifact, if there is one.
    """
    mine = stage_key(stage)
    sealed, begun = depot.manifest(), depot.attempt()
    there = sealed or begun
    here = _key_here(depot)
    if here and here != (there["key"] if there else mine):
        backup_rename(depot.folder)
        here = None
    if there is None:
        return None
    if here is None and there["key"] != mine:
        depot.copy_record(MANIFEST if sealed else ATTEMPT, there)
    if begun and not sealed and begun["key"] == mine:
        if changed_inputs(stage, begun, digests_of_inputs(stage)):
            depot.set_aside()
            return None
        names = list(depot.place.files())
        while wanted := stage.wanted(names, depot.folder):
            depot.fetch_names(wanted)
            # Damaged files are not requested again; older ones are.
            names = [name for name in names if name not in wanted]
    return there["key"]


def holds_a_record(depot: RemoteArtifact) -> bool:
    """Whether the mirror folder has a manifest or attempt record."""
    return _key_here(depot) is not None


def _key_here(depot: RemoteArtifact) -> str | None:
    record = read_manifest(depot.folder) or read_attempt(depot.folder)
    return record["key"] if record else None
