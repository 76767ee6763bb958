//! Report of the checks: one line on stdout for each check, and a file.

use std::io::{self, Write};
use std::path::Path;

use convoke_comm::nccl::Library;
use jiff::Timestamp;

use super::gpu::{CheckError, Gpu};
use super::kernels;

#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) passed: bool,
    pub(crate) details: String,
}

/// The outcomes of all checks, as Markdown.
pub(crate) struct Report {
    text: String,
    failed: u32,
}

impl Report {
    pub(crate) fn new(gpu: &Gpu) -> Result<Self, CheckError> {
        let library = Library::load()?;
        let cuda = kernels::driver_version()?;
        let on = format!(
            "{}, {}, driver for CUDA {}.{}, NCCL {} ({}), convoke {}.",
            Timestamp::now().strftime("%Y-%m-%d %H:%M UTC"),
            gpu.context.name()?,
            cuda / 1000,
            cuda % 1000 / 10,
            library.version(),
            library.path().display(),
            env!("CARGO_PKG_VERSION"),
        );
        writeln!(io::stdout().lock(), "{on}")?;
        Ok(Self { text: format!("{on}\n\n| check | | seen |\n|---|---|---|\n"), failed: 0 })
    }

    pub(crate) fn add(&mut self, name: &str, outcome: &Outcome) -> Result<(), CheckError> {
        let Outcome { passed, details } = outcome;
        let word = if *passed { "passed" } else { "FAILED" };
        self.failed += u32::from(!passed);
        let cell = details.replace('|', "\\|").replace('\n', " ");
        self.text.push_str(&format!("| {name} | {word} | {cell} |\n"));
        let mut out = io::stdout().lock();
        writeln!(out, "{word:>6}  {name}: {details}")?;
        Ok(out.flush()?)
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed > 0
    }

    pub(crate) fn write(&self, path: &Path) -> Result<(), CheckError> {
        std::fs::write(path, &self.text)
            .map_err(|source| CheckError::Report { path: path.to_owned(), source })
    }
}
