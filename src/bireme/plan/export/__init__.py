"""Plans in the words of other frameworks, and why some cannot be said in them."""
