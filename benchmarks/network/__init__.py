"""``make bench-network``: exchanges of gradients over links of a known bandwidth, in time and bytes."""
