"""What is right: references that know their own error, the bound that a claimed arithmetic allows, and the verdict between the two."""

if __name__ != "flashproof.oracles":
    raise ImportError("import it as flashproof.oracles: under a second name, its modules would be loaded twice")
