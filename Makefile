# The same three commands as setup.sh, which needs no make.
.PHONY: demo test check

demo: ## train the main job on two ranks, on data that needs no download
	sh setup.sh demo

test: ## the tests
	sh setup.sh test

check: ## linters, formatter, type checker, launch files
	sh setup.sh check
