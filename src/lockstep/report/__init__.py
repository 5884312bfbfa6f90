"""`report.html`: what the folder of a run says of it, as a page."""
