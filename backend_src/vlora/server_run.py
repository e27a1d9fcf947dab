"""Names that the processes of a server share in one run: variables of models, shared memory."""

from __future__ import annotations

from pathlib import Path

# Environment variable by which a server and its models get the path of their run's folder.
RUN_VARIABLE = "VLORA_RUN"
SERVER_VARIABLE = "VLORA_SERVER"  # Environment variable by which models get their server's id.
# Environment variable by which a replica's models get the folder that all replicas share.
PEERS_VARIABLE = "VLORA_PEERS"
SHARED_MEMORY = Path("/dev/shm")


def shared_memory_prefix(folder: Path) -> str:
    """Return the prefix of the names of the run's shared memory."""
    # Triton reserves its beginning from release 25.07 on, so no client can register this memory.
    return f"triton_python_backend_shm_region_vlora_{folder.name}_"


def release_shared_memory(folder: Path) -> None:
    """Unlink the run's shared memory, which must not be in use."""
    for region in list(SHARED_MEMORY.glob(f"{shared_memory_prefix(folder)}*")):
        region.unlink(missing_ok=True)
