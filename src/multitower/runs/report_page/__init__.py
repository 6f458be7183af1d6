"""What `report.html` is made of: numbers in words, curves, charts, images and tables, as HTML."""
