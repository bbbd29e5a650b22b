"""Identical-weight sharing: a draft beside its verifier, equal weights held once."""

from __future__ import annotations

from weightsync.loader.pair import LoadedPair, load_pair
from weightsync.loader.places import Place
from weightsync.loader.report import Cause, Pair, SharingReport, Tie, Verdict
from weightsync.loader.share import share_identical_weights
from weightsync.loader.ties import LostTie, check_ties, lost_ties

__all__ = [
    "Cause",
    "LoadedPair",
    "LostTie",
    "Pair",
    "Place",
    "SharingReport",
    "Tie",
    "Verdict",
    "check_ties",
    "load_pair",
    "lost_ties",
    "share_identical_weights",
]
