"""Results of pd bench as a page that opens anywhere."""
