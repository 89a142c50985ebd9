"""The recipes: a model and a Task each. They import ddptrain's protocols and data, nothing deeper."""
