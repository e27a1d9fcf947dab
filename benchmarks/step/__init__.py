"""One engine step against its roofline, part by part."""
