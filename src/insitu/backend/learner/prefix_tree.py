"""The tree of token sequences that begin alike, in which each token is computed once.

Shapes: T tokens of all nodes, in depth-first order.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from insitu.backend.attention import Node, Nodes

MIN_SHARED = 16
"""Minimum tokens that two sequences share in a node: each node costs two more attention calls in every layer."""


class PrefixTree(NamedTuple):
    """T distinct tokens with their positions; `paths` maps the tokens of each sequence to their places among the T."""

    token_ids_T: np.ndarray
    positions_T: np.ndarray
    nodes: Nodes
    paths: list[np.ndarray]


def build_tree(keys: Sequence[bytes], shared_with_last: Sequence[int]) -> PrefixTree:
    """The tree of distinct sequences by their sort keys (big-endian uint32), in ascending order.

    `shared_with_last` is the length of the prefix that each shares with the sequence before it.
    """
    branch: list[tuple[int, int, int]] = []  # start, stop and depth of the nodes of the latest sequence
    nodes: list[Node] = []
    tokens: list[np.ndarray] = []
    paths: list[np.ndarray] = []
    end = 0
    for number, (key, shared) in enumerate(zip(keys, shared_with_last, strict=True)):
        while branch and branch[-1][2] >= shared:
            start, stop, _ = branch.pop()
            nodes.append(Node(start, stop, end))
        if branch:
            start, stop, depth = branch.pop()
            cut = start + shared - depth
            if cut < stop and shared - depth < MIN_SHARED:
                shared, cut = depth, start
            if cut < stop:
                nodes.append(Node(cut, stop, end))
            if cut > start:
                branch.append((start, cut, depth))
        rest = np.frombuffer(key, ">u4")[shared:]
        tokens.append(rest)
        paths.append(
            np.concatenate([paths[-1][:shared] if number else [], np.arange(end, end + len(rest))]).astype(int)
        )
        branch.append((end, end := end + len(rest), shared))
    nodes += [Node(start, stop, end) for start, stop, _ in branch]
    positions = np.concatenate(
        [np.arange(len(path) - len(rest), len(path)) for path, rest in zip(paths, tokens, strict=True)]
    )
    return PrefixTree(np.concatenate(tokens).astype(np.int64), positions, Nodes(nodes), paths)
