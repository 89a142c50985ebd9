"""All that a recipe, an observer, a controller or a strategy imports."""
