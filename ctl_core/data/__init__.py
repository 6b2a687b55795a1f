"""Helpers for ``create_dataset``: shuffles, seeds, length buckets, splits."""

from __future__ import annotations

from ctl_core.data.buckets import bucket_by_length as bucket_by_length
from ctl_core.data.index import index_shuffle as index_shuffle
from ctl_core.data.index import index_shuffle_with_seeds as index_shuffle_with_seeds
from ctl_core.data.index import with_seeds as with_seeds
from ctl_core.data.splits import fold_of as fold_of
from ctl_core.data.splits import split_of as split_of
