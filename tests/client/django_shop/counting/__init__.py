"""A backend as others make them: with compilers of its own, and statements that it counts."""
