"""Reconcile a remote artifact with its local mirror before a build.

The remote artifact is authoritative; the mirror may be older, or belong to another run.
"""

from penstock.core.cache.input_digests import changed_inputs, digests_of_inputs, read_attempt
from penstock.core.cache.manifest import MANIFEST, read_manifest
from penstock.core.cache.stage import ATTEMPT, Stage, stage_key
from penstock.core.files import backup_rename
from penstock.core.remote.artifact_sync import RemoteArtifact


def sync_mirror(remote: RemoteArtifact, stage: Stage) -> str | None:
    """Make the mirror's record match the remote one, and download the intermediate files to resume
    from.

    Returns the key of the remote artifact, if there is one.
    """
    own_key = stage_key(stage)
    complete, attempt = remote.manifest(), remote.attempt()
    remote_key = complete or attempt
    mirror_key = _mirror_key(remote)
    if mirror_key and mirror_key != (remote_key["key"] if remote_key else own_key):
        backup_rename(remote.folder)
        mirror_key = None
    if remote_key is None:
        return None
    if mirror_key is None and remote_key["key"] != own_key:
        # The `claim` callback of the store looks at the folder on this machine.
        remote.copy_record(MANIFEST if complete else ATTEMPT, remote_key)
    if attempt and not complete and attempt["key"] == own_key:
        if changed_inputs(stage, attempt, digests_of_inputs(stage)):
            remote.move_to_backup()
            return None
        names = list(remote.root.files())
        while missing := stage.files_to_download(names, remote.folder):
            remote.fetch_names(missing)
            # Damaged files are not requested again; older ones are.
            names = [name for name in names if name not in missing]
    return remote_key["key"]


def has_record(remote: RemoteArtifact) -> bool:
    """Whether the mirror folder has a manifest or attempt record."""
    return _mirror_key(remote) is not None


def _mirror_key(remote: RemoteArtifact) -> str | None:
    record = read_manifest(remote.folder) or read_attempt(remote.folder)
    return record["key"] if record else None
