"""What queries score against the rows of a table that no rank has whole: losses and best rows."""
