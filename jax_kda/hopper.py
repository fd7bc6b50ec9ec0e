"""What kda_chunk_fwd and kda_chunk_bwd on CUDA cut their work into, and the workspace it takes.

Both follow from shapes alone: XLA plans the workspace before there is a GPU. B rows of T tokens, M
sequences a row (1 unless packed), HV value heads; chunks are 64 tokens.
"""

from collections.abc import Callable
from typing import Any

_SMS = 132  # of an H100 or H200: sizes must follow from shapes alone


def chunk_slots(B: Any, T: Any, M: Any, packed: bool) -> Any:
    """The most chunks of 64 tokens that the sequences of B rows can have."""
    return B * ((T + 63 * M) // 64) if packed else B * ((T + 63) // 64)


def _shortest(
    sizes: tuple[Any, ...],
    scan: Callable[[int, int], int],
    cut: Callable[[int, int], int],
    summaries: Callable[[int], int],
) -> int:
    """Chunks a segment that take the least time, 0 if that is to scan sequences whole, or if
    `sizes` (B, T, HV, M, packed) are symbolic.

    Times are in ns: `scan` of so many chains of so many chunks, `cut` what so many segments of so
    many chunks take besides. `summaries` is the blocks a chain has for them, all at once.
    """
    B, T, HV, M, packed = sizes
    if not all(isinstance(size, int) for size in (B, T, HV, M)) or B * M * HV * T == 0:
        return 0
    N, chains = B * M, B * M * HV
    chunks = -(-chunk_slots(B, T, M, packed) // N)  # of a sequence, were all alike
    best, time = 0, scan(chains, chunks)
    for segments in range(2, _SMS // chains + 1):
        if summaries(segments) * chains > _SMS:
            break
        length = -(-chunks // segments)
        if (total := cut(segments, length) + scan(segments * chains, length)) < time:
            best, time = length, total
    return best


def segment_chunks(B: Any, T: Any, HV: Any, M: Any, packed: bool) -> int:
    """Chunks a segment, where kda_chunk_fwd on CUDA cuts its scan; 0 where sequences are scanned
    whole, as with symbolic dimensions.

    Few chains (a sequence and a head each) leave most of a GPU idle. Cut into segments they take
    three passes: what each segment does to a state, the states between them, and the scan proper.
    Costs in ns, measured on one H200: docs/kernels.md.
    """

    def scan(chains: int, length: int) -> int:
        latency = 1250 if 2 * chains <= _SMS else 1700  # with V on two SMs where they suffice
        return length * max(latency, 27 * chains)  # or what memory allows

    return _shortest(
        (B, T, HV, M, packed),
        scan,
        lambda segments, length: 20_000 + 1450 * length + 1000 * (segments - 2),
        lambda segments: 2 * segments - 3,  # of states but the last, transitions but of the ends
    )


def slice_chunks(B: Any, T: Any, HV: Any, M: Any, packed: bool) -> int:
    """Chunks a slice, where kda_chunk_fwd on CUDA prepares long rows in slices, each on the SMs
    that the scan of the one before leaves; else 0.

    A scan takes an SM a chain (a row and a head each), and two while they suffice. Which slices
    gain where it leaves others is measured, and is less than an idle SM suggests, since both want
    memory: docs/kernels.md.
    """
    if packed or not all(isinstance(size, int) for size in (B, T, HV)):
        return 0
    if T < 8192 or segment_chunks(B, T, HV, M, packed):
        return 0
    chains = B * HV
    if chains <= 40:
        most = 43
    elif _SMS // 2 < chains <= 100:
        most = 64
    else:
        return 0
    chunks = -(-T // 64)
    slices = -(-chunks // most)
    return -(-chunks // slices)  # none much shorter than the others


def gradient_segment_chunks(B: Any, T: Any, HV: Any, M: Any, packed: bool) -> int:
    """Chunks a segment for kda_chunk_bwd, or 0: its two scans run side by side and share the
    transitions.
    """

    def scans(chains: int, length: int) -> int:
        latency = 1850 if 4 * chains <= _SMS else 2700
        return length * max(latency, 72 * chains)

    return _shortest(
        (B, T, HV, M, packed),
        scans,
        lambda segments, length: 22_000 + 2100 * length + 1000 * (segments - 2),
        lambda segments: 3 * segments - 4,  # of S, of dS and transitions, but of the ends
    )


def _segments(B: Any, NT: Any, M: Any, packed: bool, cut: int) -> Any:
    """Numbers of segments of `cut` chunks."""
    return 0 if not cut else NT // cut + B * M if packed else B * -(-NT // B // cut)


def chunk_fwd_workspace_bytes(B: Any, T: Any, HV: Any, M: Any, packed: bool) -> Any:
    """ChunkFwdWorkspaceBytes of kda_chunk_fwd on CUDA, on symbolic dimensions too."""
    C, K = 64, 128
    cut = segment_chunks(B, T, HV, M, packed)
    NT = chunk_slots(B, T, M, packed)
    triangle = 10 * 16 * 16 * 2  # the blocks of A_inv, or Aqk, that are not above its diagonal
    image = 3 * C * K * 2 + 2 * triangle + K * 4 + 128
    plan = 16 * NT + 32 * B * M if packed else 0
    states = 2 * _segments(B, NT, M, packed, cut)
    if slice_chunks(B, T, HV, M, packed):
        states = B
    return NT * HV * image + states * HV * K * K * 4 + plan + 256


def chunk_bwd_workspace_bytes(B: Any, T: Any, H: Any, HV: Any, M: Any, packed: bool) -> Any:
    """ChunkBwdWorkspaceBytes of kda_chunk_bwd on CUDA, on symbolic dimensions too."""
    C, K, V = 64, 128, 128
    cut = gradient_segment_chunks(B, T, HV, M, packed)
    NT = chunk_slots(B, T, M, packed)
    image = 3 * C * K * 2 + 3 * C * C * 2 + K * 4 + 128 + C * 4
    record = 2 * V * K * 2 + 3 * C * V * 2
    group = _SMS * 32 * 512 * 4 if HV > H else 0
    sums = (2 * K + 16) * 4
    plan = 16 * NT + 32 * B * M if packed else 0
    segments = _segments(B, NT, M, packed, cut)
    return NT * HV * (image + record + sums) + segments * HV * 4 * K * K * 4 + plan + group + 256
