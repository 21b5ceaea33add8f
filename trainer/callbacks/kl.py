"""KL to the base model on the tokens that are learned, as tournaments with `USE_KL` score it.

The score is evaluation loss + coefficient · KL(fine-tuned || base), so the same is added to the training
loss. Evaluation masks the logits with the labels as they stand, so the distributions compared are those after
each label, not those that predict it.
"""

from __future__ import annotations

from typing import Any

#: Positions at a time: the full vocabulary in fp32, twice, for each of them.
CHUNK = 1024


def kl_of_labels(logits: Any, base_logits: Any, labels: Any) -> Any:
    """The mean over the labels' positions of KL(logits || base_logits), differentiable in `logits`."""
    import torch

    learned = labels != -100
    mine, theirs = logits[learned], base_logits[learned]
    count = mine.shape[0]
    total = logits.new_zeros((), dtype=torch.float32)
    if count == 0:
        return total
    for at in range(0, count, CHUNK):
        total = total + _summed(mine[at : at + CHUNK], theirs[at : at + CHUNK])
    return total / count


def _summed(mine: Any, theirs: Any) -> Any:
    log_p = mine.float().log_softmax(-1)
    log_q = theirs.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum()
