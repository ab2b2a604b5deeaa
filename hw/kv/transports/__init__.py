"""Ways in which a block set travels, behind one interface (``base``), and which one to take (``choose``)."""
