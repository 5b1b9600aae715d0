"""Files and words: whole files in and out, errors in the words of the file."""
