"""A one-stage detector in the manner of YOLO."""
