"""Pictures with boxes: sources, augmentation, batches."""
