"""Pages as jinja2 templates, and the style sheet that is written into each."""
