"""What ``scripts/kv`` does: look at, verify, convert and make files of block sets, and measure how fast KV moves."""
