//! Report of the checks: one line on stdout for each check, and a file.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::Path;

use convoke_comm::nccl::Library;
use jiff::Timestamp;

use super::gpu::{CheckError, Gpu};
use super::kernels;

/// The outcome of one check.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) passed: bool,
    /// Description of the outcome, with figures and units.
    pub(crate) details: String,
}

impl Outcome {
    pub(crate) fn passed(details: String) -> Self {
        Self { passed: true, details }
    }

    pub(crate) fn failed(details: String) -> Self {
        Self { passed: false, details }
    }
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

    pub(crate) fn add(
        &mut self,
        name: &str,
        Outcome { passed, details }: &Outcome,
    ) -> Result<(), CheckError> {
        let word = if *passed { "passed" } else { "FAILED" };
        self.failed += u32::from(!passed);
        // Writing to a string cannot fail.
        let _ =
            writeln!(self.text, "| {name} | {word} | {} |", details.replace('|', "\\|").replace('\n', " "));
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
