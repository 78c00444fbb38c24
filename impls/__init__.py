"""The attention implementations of this project, and the types of their claims."""

if __name__ != "flashproof.impls":
    raise ImportError("import it as flashproof.impls: under a second name, its modules would be loaded twice")
