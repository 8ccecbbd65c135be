"""The last versions of a training's state in the memory of its nodes: saved often, loaded after a rank is lost."""
