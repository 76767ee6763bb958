//! Output of rank 0, on stdout and stderr.

use std::io::{self, IsTerminal, Write};
use std::{env, mem};

use terminal_size::{Height, Width, terminal_size_of};

use super::flags::{Flags, OutputFormat};
use super::pairs::Pairs;
use super::rows::Row;
use super::stats;
use super::table::{self, Columns};

/// The output of `convoke-perf`. It prints on rank 0, and nothing on other ranks.
pub(crate) struct Report<'a> {
    flags: &'a Flags,
    transport: String,
    is_printing: bool,
    /// Width and height in characters, if stdout is a terminal that can show bars.
    screen: Option<(usize, usize)>,
    /// The standard stream for progress messages; `None` if this rank shows none.
    progress: Option<Stream>,
    columns: Option<Columns>,
    /// Number of printed rows without bars. Bars need the largest value of all rows.
    without_bars: usize,
    pub(crate) rows: Vec<Row>,
}

#[derive(Debug, Clone, Copy)]
enum Stream {
    Stdout,
    Stderr,
}

pub(crate) struct HostRanks {
    /// Names of the hosts, all distinct.
    pub(crate) names: Vec<String>,
    pub(crate) ranks: Vec<Vec<usize>>,
}

impl<'a> Report<'a> {
    /// Creates the output. `backend` is the name of the group's transport.
    pub(crate) fn new(flags: &'a Flags, is_printing: bool, backend: &str) -> Self {
        let set = |name| env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = env::var_os("TERM").is_some_and(|term| term == "dumb");
        let shows_bars = io::stdout().is_terminal() && !dumb && !set("NO_COLOR");
        let progress = match (io::stdout().is_terminal(), io::stderr().is_terminal()) {
            (true, _) => Some(Stream::Stdout),
            (_, true) => Some(Stream::Stderr),
            _ => None,
        };
        let size = terminal_size_of(io::stdout());
        let screen = size.map(|(width, height)| (usize::from(width.0), usize::from(height.0)));
        Self {
            flags,
            transport: flags.transport.clone().unwrap_or_else(|| backend.to_owned()),
            is_printing,
            screen: screen.filter(|_| shows_bars && flags.output_format() == OutputFormat::Table),
            progress: progress.filter(|_| is_printing && !dumb),
            columns: None,
            without_bars: 0,
            rows: Vec::new(),
        }
    }

    /// Prints the hosts, the ranks and the method of measurement.
    pub(crate) fn print_header(
        &mut self,
        host_ranks: &HostRanks,
        ranks: usize,
        only_pairs: bool,
    ) -> io::Result<()> {
        if self.flags.output_format() != OutputFormat::Table {
            return Ok(());
        }
        let plural =
            |number: usize, what: &str| format!("{number} {what}{}", if number == 1 { "" } else { "s" });
        let (ranks, hosts) = (plural(ranks, "rank"), plural(host_ranks.names.len(), "host"));
        let (version, transport) = (env!("CARGO_PKG_VERSION"), &self.transport);
        self.print_line(&format!("# convoke-perf {version}: {ranks} on {hosts}, {transport}"))?;
        for (name, ranks) in host_ranks.names.iter().zip(&host_ranks.ranks) {
            let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
            self.print_line(&format!("#   {name}: {noun} {}", table::ranks(ranks)))?;
        }
        if only_pairs { Ok(()) } else { self.print_line(&format!("# {}", self.flags.describe_method())) }
    }

    /// Prints the header above the rows of one collective.
    fn begin_collective(&mut self, first: &Row) -> io::Result<()> {
        if self.flags.output_format() != OutputFormat::Table {
            return Ok(());
        }
        let width = self.screen.map(|(width, _)| width);
        let columns = Columns::new(first.case.collective, first.algorithm.is_some(), width);
        self.columns = Some(columns);
        self.print_line(&format!("\n{}", first.case.collective))?;
        columns.head().iter().try_for_each(|line| self.print_line(line))
    }

    pub(crate) fn print_row(&mut self, row: Row) -> io::Result<()> {
        if self.rows.last().is_none_or(|last| last.case.collective != row.case.collective) {
            self.begin_collective(&row)?;
        }
        let (system, transport) = (&self.flags.system, &self.transport);
        match (self.flags.output_format(), self.columns) {
            (OutputFormat::Csv, _) => {
                self.print_line(&row.csv(system, transport, self.flags.has_several_ops()))?
            }
            (OutputFormat::Json, _) => self.print_line(&row.json(transport))?,
            (OutputFormat::Table, Some(columns)) => self.print_line(&columns.row(&row, None))?,
            (OutputFormat::Table, None) => {}
        }
        self.without_bars += 1;
        self.rows.push(row);
        Ok(())
    }

    /// Ends the rows of one collective. On a terminal it prints them again with bars.
    pub(crate) fn end_collective(&mut self) -> io::Result<()> {
        let lines = mem::take(&mut self.without_bars);
        let Some((columns, (_, height))) = self.columns.filter(|columns| columns.has_bars()).zip(self.screen)
        else {
            return Ok(());
        };
        // Lines that have scrolled off the screen cannot be overwritten.
        if !self.is_printing || lines >= height {
            return Ok(());
        }
        let rows = &self.rows[self.rows.len() - lines..];
        let most = rows.iter().map(Row::bus_bandwidth).fold(0.0, f64::max);
        self.show_progress("");
        write!(io::stdout(), "\x1b[{lines}A")?;
        rows.iter().try_for_each(|row| self.print_line(&columns.row(row, Some(most))))
    }

    pub(crate) fn print_pairs(&mut self, pairs: &Pairs, host_ranks: &HostRanks) -> io::Result<()> {
        let (system, transport) = (&self.flags.system, &self.transport);
        let lines = match self.flags.output_format() {
            OutputFormat::Table => pairs.text(&host_ranks.names),
            OutputFormat::Csv => pairs.csv(&host_ranks.names, system, transport),
            OutputFormat::Json => pairs.json(&host_ranks.names),
        };
        lines.iter().try_for_each(|line| self.print_line(line))
    }

    pub(crate) fn print_footer(&mut self) -> io::Result<()> {
        match self.flags.output_format() {
            OutputFormat::Csv => self.print_line("# done"),
            OutputFormat::Json => Ok(()),
            OutputFormat::Table => {
                let with_data: Vec<&Row> = self.rows.iter().filter(|row| row.count > 0).collect();
                let of_each = with_data.chunk_by(|a, b| a.case.collective == b.case.collective);
                let means = of_each.filter_map(|rows| {
                    let bandwidths: Vec<f64> = rows.iter().map(|row| row.bus_bandwidth()).collect();
                    let mean = table::digits(stats::mean(&bandwidths));
                    rows.first().map(|row| format!("{} {mean}", row.case.collective))
                });
                let means = means.collect::<Vec<_>>().join(", ");
                if means.is_empty() {
                    return Ok(());
                }
                self.print_line(&format!("\n# average bus bandwidth, GB/s: {means}"))
            }
        }
    }

    /// Shows a progress message on a terminal, in a line that the next output overwrites.
    pub(crate) fn show_progress(&self, text: &str) {
        let write = |mut terminal: Box<dyn Write>, size: Option<(Width, Height)>| {
            let width = size.map_or(80, |(width, _)| usize::from(width.0));
            let text: String = text.chars().take(width.saturating_sub(1)).collect();
            let _ = write!(terminal, "\r\x1b[K{text}").and_then(|()| terminal.flush());
        };
        match self.progress {
            // If stdout is a terminal, progress messages go to stdout like the rows, because the terminal may
            // reorder two streams.
            Some(Stream::Stdout) => write(Box::new(io::stdout()), terminal_size_of(io::stdout())),
            Some(Stream::Stderr) => write(Box::new(io::stderr()), terminal_size_of(io::stderr())),
            None => {}
        }
    }

    /// Prints a line after erasing the progress message.
    fn print_line(&self, line: &str) -> io::Result<()> {
        if !self.is_printing {
            return Ok(());
        }
        self.show_progress("");
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "{line}")?;
        stdout.flush()
    }
}

impl Drop for Report<'_> {
    fn drop(&mut self) {
        self.show_progress("");
    }
}
