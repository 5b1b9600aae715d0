"""A soak from outside its ranks: started, watched, ended in order, reported."""
