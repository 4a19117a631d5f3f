"""What lies behind the URL and what lies in its mirror, before a build: who is right, and from
where to go on. Behind the URL is the truth; the mirror may be older, or of another run.
"""

from penstock.core.cache.input_digests import changed_inputs, digests_of_inputs, read_attempt
from penstock.core.cache.manifest import MANIFEST, read_manifest
from penstock.core.cache.stage import ATTEMPT, Stage, stage_key
from penstock.core.files import backup_rename
from penstock.core.remote.artifact_sync import RemoteArtifact


def sync_mirror(depot: RemoteArtifact, stage: Stage) -> str | None:
    """Make the mirror say of the folder what the URL says, and fetch the keepsakes to go on from.

    Returns the key of what lies behind the URL, if something does.
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
            # What is damaged there is not asked for again, but something older.
            names = [name for name in names if name not in wanted]
    return there["key"]


def holds_a_record(depot: RemoteArtifact) -> bool:
    """Whether the mirror's folder says of what it is."""
    return _key_here(depot) is not None


def _key_here(depot: RemoteArtifact) -> str | None:
    record = read_manifest(depot.folder) or read_attempt(depot.folder)
    return record["key"] if record else None
