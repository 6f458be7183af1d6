"""The networks of the recipes in plain JAX: a tree of parameters and a function of it."""
