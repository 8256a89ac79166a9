"""Prefix caches as a tree of `LiveNode`, whatever they are inside."""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import islice

import numpy as np

from minisgl.core.request import Int32Array
from minisgl.kvcache.block_hash import Block, BlockHashCache
from minisgl.kvcache.prefix import PrefixCache
from minisgl.kvcache.radix import Node, RadixCache
from minisgl.server.live.state import HEAD, MOST_NODE_PAGES, MOST_NODES, LiveNode

MOST_VISITED = 4000
"""Nodes or blocks that are looked at. A larger tree is shown in part: a look must not hold up the engine."""


def nodes_of(cache: PrefixCache) -> tuple[list[LiveNode], int]:
    """What a prefix cache holds, and how many nodes that are in all.

    Returns:
        At most `MOST_NODES`, the most recently used ones where the cache knows, each after its parent; and their number
        before this cut. Nothing for a cache of a kind that is unknown here.
    """
    if isinstance(cache, RadixCache):
        visited = list(islice(cache.nodes(), MOST_VISITED))
        # Who uses a node uses its parents, and of equals the first come first: no node is without its parent.
        latest = heapq.nlargest(MOST_NODES, visited, key=lambda node: node.last_access)
        return [_node(node) for node in latest], len(visited)
    if isinstance(cache, BlockHashCache):
        chains = _chain_nodes(list(islice(cache.blocks(), MOST_VISITED)), cache.page_size)
        return chains[:MOST_NODES], len(chains)
    return [], 0


def _node(node: Node) -> LiveNode:
    assert node.parent is not None
    return LiveNode(
        uid=node.uid,
        parent=node.parent.uid,
        tokens=len(node.tokens),
        num_pages=len(node.pages),
        pages=node.pages[:MOST_NODE_PAGES].tolist(),
        locks=node.lock_count,
        last_used=node.last_access,
        head=node.tokens[:HEAD].tolist(),
    )


def _chains(blocks: list[Block]) -> tuple[list[list[Block]], dict[Block, list[Block]]]:
    """Blocks as runs: one goes on as long as each block has one successor, and as many references as that.

    Returns:
        The chains, each after the one that it continues; and every block's.
    """
    successors = Counter(block.parent for block in blocks)
    chain_of: dict[Block, list[Block]] = {}
    chains: list[list[Block]] = []
    for block in blocks:
        parent = block.parent
        if parent in chain_of and successors[parent] == 1 and parent.ref_count == block.ref_count:
            chain = chain_of[parent]
        else:
            chain = []
            chains.append(chain)
        chain.append(block)
        chain_of[block] = chain
    return chains, chain_of


def _chain_nodes(blocks: list[Block], page_size: int) -> list[LiveNode]:
    """Chains of blocks as nodes. A chain is named by its first page, counted from 1, because 0 is the root's."""
    chains, chain_of = _chains(blocks)
    nodes = []
    for chain in chains:
        parent = chain_of.get(chain[0].parent) if chain[0].parent is not None else None
        head: Int32Array = np.frombuffer(b"".join(block.tokens for block in chain[:HEAD]), dtype=np.int32)
        nodes.append(
            LiveNode(
                uid=chain[0].page + 1,
                parent=parent[0].page + 1 if parent else 0,
                tokens=len(chain) * page_size,
                num_pages=len(chain),
                pages=[block.page for block in chain[:MOST_NODE_PAGES]],
                locks=chain[0].ref_count,
                last_used=0,
                head=head[:HEAD].tolist(),
            )
        )
    return nodes
