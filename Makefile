# The same commands as setup.sh, which needs no make.
.PHONY: demo test check docs

demo: ## train the main job on two ranks, on data that needs no download
	sh setup.sh demo

test: ## the tests
	sh setup.sh test

check: ## linters, formatter, type checker, launch files
	sh setup.sh check

docs: ## the site, into site/
	sh setup.sh docs
