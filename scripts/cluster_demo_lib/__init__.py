"""Parts of ``scripts/cluster_demo``: a cluster of four nodes on this machine, a changing load, and what became of it."""
