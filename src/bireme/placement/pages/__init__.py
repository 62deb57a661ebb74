"""What is found, as a document, a table and a picture."""
