"""ddptrain from Python and notebooks: `ddptrain.train`, `ddptrain.Run` and `ddptrain.load`."""
