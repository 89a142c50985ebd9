"""Which samples, how they are loaded, augmented and brought to the device."""
