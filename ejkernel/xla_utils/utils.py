"""Every name of `ejkernel.xla_utils`, at the documented module path."""

from ejkernel.xla_utils.gradients import identity_dtype_convert
from ejkernel.xla_utils.packing import (
    cdiv,
    cu_seqlens_from_lens,
    pack,
    prepare_chunk_indices,
    prepare_chunk_offsets,
    prepare_cu_seqlens_from_mask,
    prepare_lens,
    prepare_lens_from_mask,
    prepare_position_ids,
    prepare_sequence_ids,
    prepare_token_indices,
    unpack,
)
from ejkernel.xla_utils.segments import mask_to_segment_ids, segment_ids_from_cu_seqlens, segment_ids_to_mask

__all__ = [
    "cdiv",
    "cu_seqlens_from_lens",
    "identity_dtype_convert",
    "mask_to_segment_ids",
    "pack",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
    "prepare_cu_seqlens_from_mask",
    "prepare_lens",
    "prepare_lens_from_mask",
    "prepare_position_ids",
    "prepare_sequence_ids",
    "prepare_token_indices",
    "segment_ids_from_cu_seqlens",
    "segment_ids_to_mask",
    "unpack",
]
