"""What all detectors share (answers, metrics, figures, prediction, export), and those of other libraries."""
