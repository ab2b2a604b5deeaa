"""KV cache moves between engines: what a block of it is, who may use it, and how it gets there.

``manifest`` says what the bytes mean, ``record`` carries them, ``prefix`` names the tokens they belong to, and ``verdict``
decides what a receiver does with them. The format is specified in ``docs/kv_block_format.md``.
"""
